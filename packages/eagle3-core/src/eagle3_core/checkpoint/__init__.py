"""Reading and writing draft checkpoints: the canonical layout and every public producer's."""

from eagle3_core.checkpoint.export import DESTINATIONS, export_draft
from eagle3_core.checkpoint.read import LoadedDraft, load_draft
from eagle3_core.checkpoint.report import Report
from eagle3_core.checkpoint.write import save_draft

__all__ = ["DESTINATIONS", "LoadedDraft", "Report", "export_draft", "load_draft", "save_draft"]
