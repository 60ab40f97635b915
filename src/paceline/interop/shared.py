"""Resources that two loaders share, such as a staged copy of their data set."""

import atexit
import weakref
from contextlib import ExitStack


class SharedResources:
    """Keep `held` open until no loader refers to this object, or the program exits."""

    def __init__(self, resources: ExitStack) -> None:
        # Registered last, so called first: multiprocessing's own handler would wait for workers that were not stopped.
        atexit.register(weakref.finalize(self, resources.close))
