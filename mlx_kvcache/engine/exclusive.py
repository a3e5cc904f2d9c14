"""One verb of an engine at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from mlx_kvcache.errors import SessionError

_Owner = TypeVar("_Owner")
_P = ParamSpec("_P")
_Answer = TypeVar("_Answer")


def exclusive(
    verb: Callable[Concatenate[_Owner, _P], _Answer],
) -> Callable[Concatenate[_Owner, _P], _Answer]:
    """A method that is refused while another such method of the same object runs in this thread.

    A sampler, a signal handler or a finalizer may call it then. Raises `SessionError`.
    """

    @wraps(verb)
    def alone(owner: _Owner, /, *args: _P.args, **kwargs: _P.kwargs) -> _Answer:
        # The stack knows what runs, however a verb was left; a mark could outlive an interrupt.
        frame, code = sys._getframe().f_back, sys._getframe().f_code
        while frame is not None:
            if frame.f_code is code and frame.f_locals["owner"] is owner:
                raise SessionError(
                    "an engine was called while it runs another call, by a sampler, a signal "
                    "handler or a finalizer; call it once that has returned (cancel may be called "
                    "at any time)"
                )
            frame = frame.f_back
        return verb(owner, *args, **kwargs)

    return alone
