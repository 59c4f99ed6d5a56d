"""Attempts: requests under ids of their own, as nodes take each id once."""

import itertools
from dataclasses import replace

_numbers = itertools.count()


def attempt(request):
    return replace(request, request_id=f"{request.request_id}.{next(_numbers)}")
