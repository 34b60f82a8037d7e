"""One process that plays points: reads them from stdin, a JSON line each, and answers each."""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any

import django


def play(stage: Any, scenario: str, kind: str, at: int, patch: str) -> dict[str, Any]:
    """Play one point and return its findings; `requests` are those that the worker sent."""
    from tests.faults.invariants import ALWAYS, FINALLY, IN_ORDER, WITHOUT_FAULT, WITHOUT_FREEZE
    from tests.faults.kinds import KINDS
    from tests.faults.scenarios import SCENARIOS

    began = time.monotonic()
    chosen, how = SCENARIOS[scenario], KINDS[kind]
    with stage.play(chosen.begin, patch):
        try:
            if not how.sends:
                stage.send()
            how.play(stage, at)
            checks = [ALWAYS, FINALLY] + [WITHOUT_FREEZE] * (not how.freezes)
            if how.strict:
                checks += [WITHOUT_FAULT] * chosen.once + [IN_ORDER] * chosen.fifo
            beside = chosen.beside and not how.strict
            spare, begun = max(how.spare, int(beside)), how.begun
            if chosen.recorded:  # as about the loss of a process, there is a report
                spare, begun = 0, max(spare, begun)
            broken = stage.check(
                *checks,
                spare=spare,
                begun=begun,
                in_call=chosen.in_call,
            )
        except Exception as error:
            broken = [f"the point cannot be played: {error!r}\n{traceback.format_exc()}"]
        log = stage.proxy.log
        return {
            "broken": broken,
            "struck_at": stage.proxy.struck_at,
            "requests": [(number, text[:300]) for number, text in log],
            "said": stage.said() + stage.left() if broken else "",
            "seconds": time.monotonic() - began,
        }


def main() -> None:
    django.setup()
    from tests.faults.stage import Stage

    stage = Stage()
    for line in sys.stdin:
        answer = play(stage, **json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    stage.close()


if __name__ == "__main__":
    main()
