"""The command line. Needs the extra `tools` (typer, rich), which is imported only when a command runs.

Annotations are evaluated here (no `from __future__ import annotations`): typer reads them, and some are local names.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

_default_format = warnings.formatwarning


def main() -> None:
    """Entry point of `convselect`."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"convselect: the command line needs {error.name}: pip install 'convselect[tools]'",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    warnings.formatwarning = _formatted
    try:
        _app()()
    except KeyboardInterrupt:  # while the program was still loading
        raise SystemExit(130) from None
    except OSError as error:  # commands report their own files: this is mostly what they print to, say on a full disk
        from convselect.cli.console import sentence

        what = "" if error.filename is not None else "the output cannot be written: "
        print(f"convselect: {what}{sentence(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Show convselect's own warnings without the source line, since they are addressed to the user."""
    from convselect import ConvselectWarning

    if issubclass(category, ConvselectWarning):
        return f"{message}\n"
    return _default_format(message, category, filename, lineno, line)


def _app() -> "typer.Typer":
    import typer

    app = typer.Typer(
        help="A drop-in nn.Conv2d that picks the fastest correct algorithm per shape and direction.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    from convselect.cli import console, report, store, tools, tune
    from convselect.cli import model as cli_model

    cli_model.register(app)
    tools.register(app)
    tune.register(app)
    report.register(app)
    app.add_typer(store.app, name="store")

    @app.command()
    def demo(
        model: Annotated[
            str | None, typer.Option(help="Your own model: module:function, called without arguments.")
        ] = None,
        input_shape: console.InputShape = None,
        only: Annotated[
            list[str] | None, typer.Option(help="A built-in network instead of the default three; may be repeated.")
        ] = None,
        threads: Annotated[int | None, typer.Option(min=1, help="Threads; PyTorch's default otherwise.")] = None,
        seconds: Annotated[float, typer.Option(min=0.1, help="Time budget for all timing together.")] = 45.0,
        json_file: Annotated[
            Path | None, typer.Option("--json", help="Write the results to this file as well.")
        ] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Tiny images; says nothing about speed.")] = False,
        malloc_tuning: console.MallocTuning = True,
    ) -> None:
        """What runs where in real networks, how exact it is, and how fast next to nn.Conv2d."""
        from convselect import NotApplicable
        from convselect.demo import demo as demonstration

        if malloc_tuning:
            demonstration.restart_with_tuned_malloc()
        with console.refusing("demo", ValueError, files=False):
            console.check_writable(json_file, "--json")
        with console.refusing("demo", demonstration.DemoError, NotApplicable, files=False):
            if (model is None) != (input_shape is None):
                raise demonstration.DemoError("--model and --input N,C,H,W go together")
            own = None
            if model is not None and input_shape is not None:
                own = demonstration.load_user_model(model, demonstration.parse_shape(input_shape))
            results = demonstration.run_demo(
                only or None, own, seconds=seconds, threads=threads, quick=quick, console=console.console()
            )
        with console.refusing("demo", OSError, files=False):
            if json_file is None:
                return
            json_file.write_text(json.dumps(results, indent=1) + "\n")

    return app


if __name__ == "__main__":
    main()
