"""Training data without a download, in an order that depends on the seed alone. Imports no jax.

A *source* holds samples and reads any of them by number; a *loader* turns a source, or any iterable
of the user's, into global batches and knows its exact position.
"""

from arena_jax.data.corpus import Corpus as Corpus
from arena_jax.data.corpus import standard_library as standard_library
from arena_jax.data.corpus import text_files as text_files
from arena_jax.data.corpus import token_file as token_file
from arena_jax.data.images import DIGIT_SIZE as DIGIT_SIZE
from arena_jax.data.images import Digits as Digits
from arena_jax.data.images import Shapes as Shapes
from arena_jax.data.loader import EvalBatches as EvalBatches
from arena_jax.data.loader import IterableLoader as IterableLoader
from arena_jax.data.loader import Loader as Loader
from arena_jax.data.loader import SampleLoader as SampleLoader
from arena_jax.data.loader import SequenceLoader as SequenceLoader
from arena_jax.data.loader import Source as Source
from arena_jax.data.loader import as_loader as as_loader
from arena_jax.data.order import permute as permute
from arena_jax.data.tokens import MaskedWindows as MaskedWindows
from arena_jax.data.tokens import TokenWindows as TokenWindows
