"""`jaxkv generate`: continue prompts and print the text as it is generated."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxkv.cli import flags
from jaxkv.cli.files import print_json, read_text
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt
from jaxkv.cli.progress import Progress, say
from jaxkv.errors import UserError

if TYPE_CHECKING:
    from jaxkv.models.generation.text import Answer, Generation

BATCH = 8


FLAGS = (
    ("prompt-file", str, None, "FILE", "file with one prompt"),
    ("prompts", str, None, "FILE", "file with a prompt a line; empty lines are skipped"),
    ("batch", flags.integer(1), BATCH, "N", "continue at most N of several prompts together; the "
     "seed of the first is --seed, each later one adds 1"),
    ("json-schema", str, None, "FILE", "file with a JSON schema, which each answer obeys"),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="texts to continue; - reads standard input"
    )
    flags.add(parser, *FLAGS)
    flags.add_policy(parser)
    flags.add_json(parser)
    flags.add_sampling(parser, max_new_tokens=256)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    prompts = read_prompts(args)
    schema = None if args.json_schema is None else read_text(args.json_schema, "schema")
    several = len(prompts) > 1 or args.prompts is not None
    rest = len(prompts) % args.batch  # sequences of the last batch
    batches = {size for size in (min(args.batch, len(prompts)), rest) if size}
    llm, load = flags.open_model(args, args.policy, batches=batches)
    sampling = flags.sampling_of(args, llm)
    from jaxkv.models.generation.grammar import Grammar
    from jaxkv.models.generation.text import Generation, encode

    grammar = None if schema is None else Grammar("json_schema", schema)
    # With one seed for all, the same draws would make the texts alike.
    seeds = [(args.seed + number) % 2**32 for number in range(len(prompts))]
    encoded, batches, press = encode(llm, prompts), [], Press()
    with press:
        for start in range(0, len(prompts), args.batch):
            chunk = slice(start, start + args.batch)
            generation = Generation(
                llm,
                encoded[chunk],
                args.policy,
                args.max_new_tokens,
                sampling=sampling,
                seed=seeds[chunk],
                stop=args.stop,
                ignore_eos=args.ignore_eos,
                schema=grammar,
            )
            if not batches:
                load()  # while its programs are compiled
            if batch := generate(generation, not (args.json or several), press):
                batches.append(batch)
                if several and not args.json:
                    print_answers(prompts[chunk], batch)
            if press.came:
                break
    flags.report_unusable_cache(args, llm)
    answers = [answer for batch in batches for answer in batch]
    if args.json:
        records = [dataclasses.asdict(answer) for answer in answers]
        for number, answer in enumerate(records if several else ()):
            answer |= {"prompt": prompts[number], "seed": seeds[number]}
        settings = {"sampling": vars(sampling), "seed": args.seed, "versions": flags.versions()}
        print_json(({"answers": records} if several else records[0]) | settings)
    else:
        done = f"{len(answers)} of {len(prompts)} prompts" if several else answers[0].finish_reason
        say(summary(batches, done))
    return INTERRUPTED if press.came else 0


class Pressed(Exception):
    """Ctrl-C came during prefill."""


class Press(contextlib.ExitStack):
    """Whether Ctrl-C came; before there is a text to keep, Ctrl-C exits at once instead."""

    def __init__(self) -> None:
        super().__init__()
        self._event, self._watches = threading.Event(), False

    @property
    def came(self) -> bool:
        return self._event.is_set()

    def watch(self) -> None:
        """From now on until the end of this context there is a text to keep."""
        if not self._watches:
            self.enter_context(on_interrupt(self._event.set))
            self._watches = True


def generate(generation: Generation, streams: bool, press: Press) -> list[Answer]:
    """The answers of one batch.

    streams: print the text of its only prompt as it comes. press: ends the texts. Empty if Ctrl-C
    came during prefill, while earlier batches have answers.
    """

    def show(texts: Sequence[str]) -> None:
        if streams and texts[0]:
            print(texts[0], end="", flush=True)

    with Progress("compiling and prefilling") as progress:

        def at(done: int, total: int) -> None:
            progress.at(done, total)
            if press.came:  # between two chunks, where the stream may be left
                raise Pressed

        blocks = generation.blocks(at)
        try:
            first = next(blocks)
        except Pressed:
            return []
    press.watch()
    show(first)
    for texts in blocks:
        show(texts)
        if press.came:
            show([output.end("interrupted") for output in generation.outputs])
            break
    answers = generation.answers()
    if streams and not answers[0].text.endswith("\n"):
        print(flush=True)
    return answers


def print_answers(prompts: Sequence[str], answers: Sequence[Answer]) -> None:
    """Print the prompts and their texts in order, with an empty line after each."""
    for prompt, answer in zip(prompts, answers, strict=True):
        text = "".join(f"> {line}\n" for line in prompt.split("\n")) + answer.text
        print(text, end="\n" if text.endswith("\n") else "\n\n", flush=True)


def summary(batches: Sequence[Sequence[Answer]], done: str) -> str:
    """Speed and memory in one line. done: how it ended."""
    from jaxkv.state.memory import show as show_bytes

    tokens = sum(len(answer.tokens) for batch in batches for answer in batch)
    # Every answer has the seconds and bytes of its whole batch.
    first = [batch[0] for batch in batches]
    rate = tokens / max(sum(answer.decode_seconds for answer in first), 1e-9)
    return (
        f"{tokens} tokens ({done}), {rate:.1f} tokens/s, "
        f"compiled {sum(answer.compile_seconds for answer in first):.1f} s, "
        f"state {show_bytes(max(answer.state_bytes for answer in first))}"
    )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts, without the final line end that an editor or `echo` adds."""
    sources = {
        "PROMPT": bool(args.prompt),
        "--prompt-file": args.prompt_file is not None,
        "--prompts": args.prompts is not None,
    }
    chosen = [name for name, present in sources.items() if present]
    if len(chosen) > 1:
        raise UserError(
            f"the prompt is given twice, by {' and '.join(chosen)}; give one of these, not both"
        )
    if not chosen:
        hint = " (before --stop, which takes all words after it)" if args.stop else ""
        raise UserError(
            f"no prompt is given; give a text{hint}, -, --prompt-file or --prompts FILE"
        )
    if args.prompts is not None:
        lines = read_text(args.prompts, "file of prompts").split("\n")
        texts = [line.removesuffix("\r") for line in lines if line.strip()]
        if not texts:
            raise UserError(
                f"file of prompts {args.prompts} has only empty lines; give a prompt a line"
            )
        return texts
    if args.prompt_file is not None:
        texts = [read_text(args.prompt_file, "prompt file").removesuffix("\n")]
    elif args.prompt == ["-"]:
        texts = [read_text("-", "prompt").removesuffix("\n")]
    elif "-" in args.prompt:
        raise UserError("- is the only prompt where standard input is read; give it alone")
    else:
        texts = args.prompt
    if not all(texts):
        raise UserError("the prompt is empty; give at least one character")
    return texts
