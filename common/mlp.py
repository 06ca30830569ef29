"""What the two MLP rungs share: their flags, and what the three matrix products show."""

from common.flags import flag, positive
from tracereader import expect

FLAGS = (
    flag("--batch", "sequences (64)", shape=True, type=positive, default=64),
    flag("--seq", "tokens in each sequence (128)", shape=True, type=positive, default=128),
    flag("--dim", "model width (768)", shape=True, type=positive, default=768),
    flag("--hidden", "width of the hidden layer (3072)", shape=True, type=positive, default=3072),
)

# The matrix products in the order in which the forward pass calls them, for the report to name.
LAYERS = {"layers": ["gate_proj", "up_proj", "down_proj"]}


def gemm_predictions(args):
    """What holds of the matrix products, whatever runs between them."""
    yield expect.occupancy_asked_once()
    yield expect.product_sizes(args.batch * args.seq, args.dim, args.hidden)
    yield expect.down_proj_has_another_tile()
    yield expect.regime_is("compute-bound" if args.record_shapes else "GPU-bound")
