"""How `--help` looks: the same on every Python, paragraphs as they were written."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """`-w, --wait SECONDS` on one line, as Python 3.13 has it, in place of naming SECONDS twice."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, (action.dest or "").upper())
        return f"{', '.join(action.option_strings)} {value}"
