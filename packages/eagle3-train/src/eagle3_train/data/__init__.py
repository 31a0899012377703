"""From conversations to tokens with a loss mask, and the draft vocabulary they imply."""

from eagle3_train.data.cache import cached, prepared_from
from eagle3_train.data.drops import Drops, Unusable
from eagle3_train.data.mask import Example, to_examples
from eagle3_train.data.prepare import Prepared, prepare, show
from eagle3_train.data.read import Conversation, read_conversations
from eagle3_train.data.template import ChatTemplate
from eagle3_train.data.vocabulary import choose_vocabulary, coverage, token_counts

__all__ = [
    "ChatTemplate",
    "Conversation",
    "Drops",
    "Example",
    "Prepared",
    "Unusable",
    "cached",
    "choose_vocabulary",
    "coverage",
    "prepare",
    "prepared_from",
    "read_conversations",
    "show",
    "to_examples",
    "token_counts",
]
