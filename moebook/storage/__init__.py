"""Files that survive a kill: written whole, locked, checked; documents that are read safely."""

from moebook.storage.documents import (
    formed,
    read_ipynb,
    read_json,
    read_places,
    read_yaml,
    tags,
)
from moebook.storage.files import (
    checkout,
    commit,
    digest,
    locked,
    part,
    replacing,
    root,
    sweep,
    text_digest,
    write,
)
