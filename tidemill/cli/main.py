"""The command line. A command's module is imported when it is called, for speed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(
    help="Asynchronous reinforcement-learning post-training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Settings in place of the recipe's")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run")]
Recipe = Annotated[Path, typer.Argument(help="Recipe, a TOML file")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else")]


def _print_version(asked: bool) -> None:
    if asked:
        import tidemill

        print(f"tidemill {tidemill.__version__}")
        raise typer.Exit


def _run(module: str, *given: Any, function: str = "") -> None:
    """Import a command's module, call its function, by default of the same name, and exit with the status."""
    command = importlib.import_module(f"tidemill.cli.commands.{module}")
    raise typer.Exit(getattr(command, function or module)(*given))


def _starting(what: str, as_json: bool) -> None:
    """Print the first line of a run at once, because its imports take seconds."""
    with contextlib.suppress(OSError, ValueError):  # an unwritable output loses only this line
        print(json.dumps({"kind": "note", "text": f"starting {what}"}) if as_json else f"  starting {what} ...", flush=True)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command()
def demo(overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Teach a small model, made here, to spell words backward: the whole system in minutes."""
    _starting("the demo: a small model, made here, learns to spell words backward", as_json)
    _run("training", overrides or [], as_json, function="demo")


@app.command("train")
def train_recipe(recipe: Recipe, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Train by a recipe. On a run that was interrupted, the same command resumes it."""
    _starting(" ".join(["to train by", str(recipe), *(overrides or [])]), as_json)
    from tidemill.cli.commands import training

    raise typer.Exit(training.by_recipe(recipe, overrides or [], as_json))  # directly: few functions stand above the loop


@app.command()
def settings(
    table: Annotated[str, typer.Argument(metavar="[TABLE]", help="Table of a recipe, or a key. Left out: all")] = "",
    as_json: AsJson = False,
) -> None:
    """List every key that a recipe may have: its default, its values and its meaning."""
    _run("settings", table, as_json)


@app.command()
def explain(recipe: Recipe, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Explain a recipe: its formulas with their sources, the numbers of a step, memory by process."""
    _run("explain", recipe, overrides or [], as_json)


@app.command()
def check(recipe: Recipe, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check whether a recipe fits here: the numbers of a step, memory by process; status 2 if not."""
    _run("check", recipe, overrides or [], as_json)


@app.command()
def new(name: Annotated[str, typer.Argument(help="Name of the folder, and of the environment's file")]) -> None:
    """Begin a task of your own: an environment, a recipe that trains it at once, a test of its reward."""
    _run("new", name)


@app.command("eval")
def evaluate(
    target: Annotated[
        Path, typer.Argument(metavar="RUN|MODEL", help="Folder of a run or of a model, or a model's name on the hub")
    ],
    overrides: Overrides = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe whose tasks a model gets. A run has its own")] = None,
    tasks: Annotated[int | None, typer.Option(help="Held-out tasks. Left out: the recipe's eval.final_tasks")] = None,
    which: Annotated[Literal["final", "initial"] | None, typer.Option(help="Model of a run. Left out: final")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure greedy accuracy on held-out tasks, with its uncertainty."""
    _run("evaluate", target, recipe, tasks, which, overrides or [], as_json)


@app.command()
def samples(
    run: RunDir,
    step: Annotated[int | None, typer.Option(help="Step, as the progress display counts. Left out: all steps")] = None,
    worst: Annotated[int | None, typer.Option(help="Replies of the lowest reward. Left out: the ten latest")] = None,
    best: Annotated[int | None, typer.Option(help="Replies of the highest reward")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show every token, with its version and logprob")] = False,
    as_json: AsJson = False,
) -> None:
    """Show replies of the policy, from a run that has ended or goes on."""
    _run("samples", run, step, worst, best, tokens, as_json)


@app.command()
def pairs(
    run: RunDir,
    out: Annotated[Path, typer.Argument(help="Path of the .jsonl file to make: rows for dpo, ipo, orpo and simpo")],
    as_json: AsJson = False,
) -> None:
    """Write preference pairs from a run: the best and the worst attempt at each task."""
    _run("pairs", run, out, as_json)


@app.command()
def ledger(
    run: RunDir,
    every: Annotated[bool, typer.Option("--all", help="Show every evaluation and event, not a few of each")] = False,
    as_json: AsJson = False,
) -> None:
    """Show every group of a run by its fate; status 1 if any was lost."""
    _run("ledger", run, every, as_json)


@app.command()
def why(run: RunDir, as_json: AsJson = False) -> None:
    """Show what a run waits for and since when, or the first cause of its end."""
    _run("why", run, as_json)


@app.command()
def drill(
    recipe: Recipe,
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Length in minutes")] = 5.0,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two faults, on average")] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of the schedule of faults")] = 0,
    spare: Annotated[list[str] | None, typer.Option(help="Role to leave alone. May be given several times")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe while its parts are killed, frozen and starved; status 1 if anything was lost."""
    if not as_json:
        _starting(f"a drill of {recipe}: about {minutes:g} min, and a start and an end of up to 2 min each", False)
    _run("drill", recipe, minutes, every, seed, spare or [], overrides or [], as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine, and whether the parts work on it."""
    _run("doctor", as_json)


@app.command()
def parity(
    model: Annotated[Path, typer.Argument(help="Folder of a model or of a run, or a model's name on the hub")],
    length: Annotated[int, typer.Option(min=8, help="Tokens of a compared row")] = 64,
    as_json: AsJson = False,
) -> None:
    """Compare the logprobs of engine, trainer and transformers, and those that a run recorded."""
    _run("parity", model, length, as_json)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of a LoRA adapter, as PEFT has it")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the model to make")],
    base: Annotated[str, typer.Option(help="Folder of the base model. Left out: as the adapter names it")] = "",
    base_dtype: Annotated[
        Literal["", "float32", "nf4", "int8"], typer.Option(help="Numbers of the base. Left out: as the adapter says")
    ] = "",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Dtype of the weights to write")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Add a LoRA adapter to its model, and write the sum as a model folder."""
    _run("merge", adapter, out, base, base_dtype, dtype, as_json)


pool = typer.Typer(help="Add engines to a run that goes on, or remove some.", no_args_is_help=True)
app.add_typer(pool, name="pool")


@pool.command("add")
def pool_add(run: RunDir, as_json: AsJson = False) -> None:
    """Start one more engine for a run that goes on; it ends with the run."""
    _run("pool", run, as_json, function="add")


@pool.command("remove")
def pool_remove(
    run: RunDir,
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="Name of the engine, as `tidemill why` shows it")],
    hand_over: Annotated[
        bool, typer.Option("--hand-over", help="Give its requests to others at once, instead of letting them end")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let an engine of a run end its requests, leave the pool and stop."""
    _run("pool", run, engine, hand_over, as_json, function="remove")


reward = typer.Typer(help="Test a recipe's reward, or judge a run's attempts again.", no_args_is_help=True)
app.add_typer(reward, name="reward")


@reward.command("test")
def reward_test(
    recipe: Recipe,
    overrides: Overrides = None,
    answers: Annotated[
        Path | None,
        typer.Option(help='File of your own replies: {"reply" or "answer": ..., "expect": "pass" or "fail"}'),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score right, empty and nonsensical replies; status 1 when right ones fail or nonsense passes."""
    _run("reward", recipe, answers, overrides or [], as_json, function="test")


@reward.command("rejudge")
def reward_rejudge(
    run: RunDir,
    overrides: Overrides = None,
    reward: Annotated[
        str | None, typer.Option(help="FILE.py:FUNCTION, or a reward's name; else the run's own as it is now")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a run's recorded attempts again, and show which outcomes changed; nothing is overwritten."""
    _run("rejudge", run, reward, overrides or [], as_json)


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="Folder of a model or of a run (its final/), or a name on the hub")],
    host: Annotated[str, typer.Option(help="Address to listen on. Any but this machine's own needs a key")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0: any free one")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must send. `ps` shows it: better a file or TIDEMILL_API_KEY")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Path of a file whose first line is the key")] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and reply. Left out: the model's")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and KV cache: float32 or bfloat16")] = "float32",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch. Left out: torch's own choice")] = None,
) -> None:
    """Serve a model by OpenAI's API: completions, chat, logprobs, streaming. Ctrl-C stops it."""
    from tidemill.cli.commands import serve

    key = serve.key_of(api_key, api_key_file)
    raise typer.Exit(serve.serve(model, host, port, key, context, dtype, threads))


def _tell(error: BaseException) -> None:
    """Print an error: its first line last, with its log or traceback from elsewhere before it."""
    from tidemill.core.errors import ConfigError, TrainingDiverged
    from tidemill.observability.safe_text import paragraphs, visible

    first, *rest = str(error).splitlines() or [type(error).__name__]
    plain = isinstance(error, (ConfigError, TrainingDiverged))  # their message is complete without notes
    for text in rest if plain else [*rest, *getattr(error, "__notes__", ())]:
        for line in text.splitlines():
            print(visible(line.expandtabs()), file=sys.stderr)
    said = f"error: {first}"
    wrapped = paragraphs(said, shutil.get_terminal_size().columns, "") if sys.stderr.isatty() else [visible(said)]
    print("\n".join(wrapped), file=sys.stderr)


_KEEP = {"demo", "train"}
"""Commands whose result is on disk, even if their output is lost."""


def _say_renamed_keys_in_one_line() -> None:
    """A key's old name in a recipe is mentioned as a plain sentence on stderr. Other warnings keep their form."""
    import warnings

    from tidemill.core.errors import RenamedKey

    usual = warnings.formatwarning

    def formatted(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
        return f"note: {message}\n" if issubclass(category, RenamedKey) else usual(message, category, *where, **more)

    warnings.formatwarning = formatted


def main() -> None:
    """Run the command line. Any failure but a bug is one sentence and a status."""
    from tidemill.cli.commands.safe_output import guard
    from tidemill.core.errors import ConfigError, TidemillError

    lost, status = guard(), 0
    _say_renamed_keys_in_one_line()
    try:
        app()
    except SystemExit as ended:  # typer always ends so
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except ConfigError as error:
        _tell(error)
        status = 2
    except (TidemillError, ValueError, OSError) as error:
        _tell(error)
        status = 1
    except asyncio.CancelledError as error:
        print("; ".join(["interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
        status = 130
    if lost() is not None and status == 0 and not _KEEP.intersection(sys.argv[1:2]):
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
