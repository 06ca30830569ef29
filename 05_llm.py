"""Rung 5: a whole decoder of transformers, from 19 tokens a second to 2,808.

On an H200 you will see 1,882 GPU activities for one token, what changes when
one launch replays them all, and a single kernel that reaches 82% of what the
memory's bandwidth allows. Most reports propose the next change.

  uv run 05_llm.py --warmup           (on a laptop: its first 4 layers)
  uv run 05_llm.py --warmup --compile reduce-overhead --attention gqa
  uv run 05_llm.py --warmup --phase prefill --logits last
"""

import functools

from common import llm_flags
from common.flags import GRAPH_MODES, answer_before_torch, parse
from tracereader import expect


def flags(argv=None):
    return llm_flags.settled(parse(argv, __doc__, __file__, *llm_flags.FLAGS))


answer_before_torch(flags, __file__)

import torch
import torch.nn.functional as F
from torch.profiler import record_function

from common import decoder, screen
from common.harness import profiler, save, unprofiled_step_us, warm_up
from common.lesson import lesson


def build(args):
    model = decoder.language_model(args)
    prompt = torch.randint(model.config.vocab_size, (args.batch, args.prompt), device=args.device)
    return model, prompt


def prefilling(args, model, prompt):
    """The step that reads the prompt: () -> logits of the last token, [batch, vocabulary]."""
    kept = decoder.new_cache(args, model)
    wanted = {"all": 0, "last": 1}[args.logits]  # 0 is transformers' default: every token's

    def prefill():
        cache = decoder.emptied(kept) if args.cache == "static" else decoder.new_cache(args, model)
        return model(prompt, past_key_values=cache, logits_to_keep=wanted).logits[:, -1]

    if args.compile and args.cache == "static":
        with torch.no_grad():
            prefill()  # which makes the cache: compiled, a second call would find another one, and be compiled again
    return prefill


def decoding(args, model, text, position):
    """The step that writes one token: () -> logits, [batch, vocabulary].

    The text's tokens at `position` are the input, and the likeliest ones are written behind them.
    """
    cache = decoder.new_cache(args, model)
    with screen.status("reading the prompt …"), torch.no_grad():
        logits = model(text[:, : args.prompt], past_key_values=cache, logits_to_keep=1).logits[:, -1]
    text[:, args.prompt] = logits.argmax(-1)

    def decode():
        token = text.index_select(1, position)
        logits = model(token, past_key_values=cache).logits[:, -1]
        position.add_(1)
        text.index_copy_(1, position, logits.argmax(-1, keepdim=True))
        return logits

    if args.persistent:
        return decoder.persistent(model, cache, text, position, inside=args.persistent == "inside")
    if args.triton:
        return decoder.by_hand(model, cache, text, position, overlap=args.triton == "overlap")
    return decode


def profiled(args, model, prompt):
    facts = {"decoding": decoder.facts(args, model)}
    if args.merge:
        decoder.merge(model)
    text = F.pad(prompt, (0, llm_flags.tokens_written(args)))
    position = torch.tensor([args.prompt], device=args.device)
    decoder.keep_address(text, position)
    fn = decoding(args, model, text, position) if args.phase == "decode" else prefilling(args, model, prompt)
    if args.compile:
        fn = torch.compile(fn, options=decoder.inductor_options(args))
    if args.graph:
        fn = decoder.recorded(fn)

    def one_step():
        with torch.no_grad(), record_function(args.phase):
            return fn()

    steps = warm_up(one_step, args)
    steps.unprofiled_us = unprofiled_step_us(one_step, args)
    with profiler(args) as prof:  # 01_matmul_add.py writes it out
        for step in steps:
            out = step()
            prof.step()
    if args.phase == "prefill":
        text[:, args.prompt] = out.argmax(-1)
    written = text[:, : int(position) + 1]
    lanes = fn.lanes() if args.persistent == "inside" else None
    check = functools.partial(decoder.check, args, model, written)
    return save(prof, args, steps, out, facts=facts, check=check, lanes=lanes)


def predictions(args):
    if args.compile and not args.graph:  # of which only the kernels are replayed
        yield expect.compiled_rows()
    if args.graph or args.compile in GRAPH_MODES:
        yield expect.graph_replay_without_copies()
    elif args.persistent:
        yield expect.regime_is("GPU-bound")
    elif args.phase == "decode":
        yield expect.regime_is("overhead-bound")


main = lesson(flags, build, profiled, predictions)
if __name__ == "__main__":
    raise SystemExit(main())
