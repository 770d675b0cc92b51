"""The reference of the command line, written by typer's own generator when the site is built."""

from __future__ import annotations

import re


def command_reference() -> str:
    """Every command with its arguments and options, as Markdown: `convselect` itself is a heading of level 2."""
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from convselect.cli.main import _app

    command = get_command(_app())
    with command.make_context("convselect", [], resilient_parsing=True) as context:
        text = get_docs_for_click(obj=command, ctx=context, name="convselect", indent=1)
    # The generator's lists of commands cut their descriptions short; each has its section anyway.
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", text)
    # "<family>.npz" in a help text is no HTML tag.
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts).replace("```console", "```text")
