"""Long texts as training data: sources (files) become documents, documents a stream of tokens, the stream windows.

Glossary. *document*: one text, here one file. *stream*: documents one after the other. *window*: S tokens of the
stream, one sequence. *data rank*: which part of the data a rank reads.
"""

from lightning_longmoe.data.module import LongTextDataModule
from lightning_longmoe.data.sources import Document, find_files
from lightning_longmoe.data.windows import GlobalOrderSampler, TokenStream, WindowDataset

__all__ = ["Document", "GlobalOrderSampler", "LongTextDataModule", "TokenStream", "WindowDataset", "find_files"]
