"""The command line. Nothing heavy is imported here: each command's module is, when it is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Asynchronous reinforcement-learning post-training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings over the recipe's")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for machines, and nothing else")]


@app.command()
def demo(overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Teach a small model, made here, to spell words backward: the whole system in minutes."""
    from tidemill.commands import training

    raise typer.Exit(training.demo(overrides or [], as_json))


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="a TOML file")], overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Train by a recipe. On a run that was interrupted, the same command goes on."""
    from tidemill.commands import training

    raise typer.Exit(training.train(recipe, overrides or [], as_json))


def main() -> None:
    """Errors that are the user's affair, or the world's, are one sentence and a non-zero status; bugs are tracebacks."""
    from tidemill.config import ConfigError
    from tidemill.failures import KNOWN

    try:
        app()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KNOWN as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
