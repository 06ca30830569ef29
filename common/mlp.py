"""What the two MLP rungs share: their flags, and the predictions about the three matrix products."""

from common.flags import flag, positive
from tracereader import expect

FLAGS = (
    flag("--batch", "sequences (64)", shape=True, type=positive, default=64),
    flag("--seq", "tokens in each sequence (128)", shape=True, type=positive, default=128),
    flag("--dim", "model width (768)", shape=True, type=positive, default=768),
    flag("--hidden", "width of the hidden layer (3072)", shape=True, type=positive, default=3072),
)

# The matrix products in the order of the forward pass. The report uses these names.
LAYERS = {"layers": ["gate_proj", "up_proj", "down_proj"]}


def gemm_predictions(args):
    """Yield the predictions about the matrix products, which hold for every kernel between them."""
    yield expect.occupancy_asked_once()
    yield expect.product_sizes(args.batch * args.seq, args.dim, args.hidden)
    yield expect.down_proj_has_another_tile()
    yield expect.regime_is("compute-bound" if args.record_shapes else "GPU-bound")
