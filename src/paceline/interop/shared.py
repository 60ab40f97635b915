"""What two loaders share, such as a staged copy of their data set: held until neither needs it."""

import atexit
import weakref
from contextlib import ExitStack


class Shared:
    """Keep `held` open until nobody holds this any more, or the program ends."""

    def __init__(self, held: ExitStack) -> None:
        # What is registered last is called first: multiprocessing would wait for workers that nobody has told to end.
        atexit.register(weakref.finalize(self, held.close))
