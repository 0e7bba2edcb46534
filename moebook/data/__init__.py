"""Data: embedded tasks, mixtures, chat formats, encoding, files, and data sets of the hub."""

from moebook.data.encoding import IGNORED, encode, padded
from moebook.data.mixtures import draw, grouped, hashes, hold_out, mixture, passages, refuse_leak
