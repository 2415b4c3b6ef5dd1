"""Tags parameters and gradients that may share one storage, such as the flat buffers of DeepSpeed and the
buckets of DDP. Such a storage belongs to the innermost module that contains all of its tensors."""

from __future__ import annotations

from .native import record_tag
from .storages import storages_of
from .texts import common_ancestor, id_of


class SharedTags:
    """Collects tags of one category. If several tensors share a storage, only one tag is recorded for it."""

    def __init__(self, category: int, shared_name: str = "") -> None:
        self.category = category
        # The name of a storage that several tensors share.
        self.shared_name_id = id_of(shared_name)
        # By the start address of a storage: the ids of the path, the name and the form in its tag.
        self._found: dict[int, tuple[int, int, int]] = {}

    def add(self, tensor, path_id: int, name_id: int) -> None:
        for pointer, form_id in storages_of(tensor):
            known = self._found.get(pointer)
            if known is None:
                self._found[pointer] = (path_id, name_id, form_id)
            elif known[:2] != (path_id, name_id):
                self._found[pointer] = (
                    common_ancestor(known[0], path_id),
                    self.shared_name_id,
                    form_id,
                )

    def record(self, seen: set[int]) -> None:
        """Records the tags of all storages that are not in `seen`, and adds these storages to `seen`."""
        for pointer, (path_id, name_id, form_id) in self._found.items():
            if pointer not in seen:
                seen.add(pointer)
                record_tag(pointer, self.category, path_id, name_id, form_id)
