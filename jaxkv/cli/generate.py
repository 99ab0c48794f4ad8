"""`jaxkv generate`: continue a prompt and print the text as it is generated."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import threading

from jaxkv.cli import flags
from jaxkv.cli.files import print_json, read_text
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text to continue; - reads standard input"
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="file with the prompt")
    flags.add_policy(parser)
    flags.add_json(parser)
    flags.add_sampling(parser, max_new_tokens=256)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    prompt = read_prompt(args)
    llm, load = flags.open_model(args, args.policy)
    sampling = flags.sampling_of(args, llm)
    from jaxkv.models.text import Generation, encode

    generation = Generation(
        llm,
        encode(llm, [prompt]),
        args.policy,
        args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
    load()  # while its programs are compiled
    show = (lambda text: None) if args.json else _print
    with Progress("compiling and prefilling") as progress:
        blocks = generation.blocks(progress.at)
        (first,) = next(blocks)
    pressed = threading.Event()
    with on_interrupt(pressed.set):
        show(first)
        for (text,) in blocks:
            show(text)
            if pressed.is_set():
                show(generation.outputs[0].end("interrupted"))
                break
    (answer,) = generation.answers()
    code = INTERRUPTED if answer.finish_reason == "interrupted" else 0
    if args.json:
        settings = {"sampling": vars(sampling), "seed": args.seed, "versions": flags.versions()}
        print_json(dataclasses.asdict(answer) | settings)
        return code
    if not answer.text.endswith("\n"):
        print(flush=True)
    from jaxkv.state.memory import show as show_bytes

    print(
        f"jaxkv: {len(answer.tokens)} tokens ({answer.finish_reason}), "
        f"{answer.tokens_per_second:.1f} tokens/s, compiled {answer.compile_seconds:.1f} s, "
        f"state {show_bytes(answer.state_bytes)}",
        file=sys.stderr,
        flush=True,
    )
    return code


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt, without the final line end that an editor or `echo` adds."""
    if args.prompt_file is not None and args.prompt is not None:
        raise UserError("the prompt is given twice; give PROMPT or --prompt-file, not both")
    if args.prompt_file is not None:
        text = read_text(args.prompt_file, "prompt file").removesuffix("\n")
    elif args.prompt == "-":
        text = read_text("-", "prompt").removesuffix("\n")
    elif args.prompt is not None:
        text = args.prompt
    else:
        hint = " (before --stop, which takes all words after it)" if args.stop else ""
        raise UserError(f"no prompt is given; give a text{hint}, - or --prompt-file FILE")
    if not text:
        raise UserError("the prompt is empty; give at least one character")
    return text


def _print(text: str) -> None:
    if text:
        print(text, end="", flush=True)
