"""Which namespaces of the tree belong to which user's namespace."""

from __future__ import annotations

import weakref

from radixkv.core.namespace import canonical_namespace
from radixkv.core.radix_tree import RadixTree

__all__ = ["KeyClaim", "KeyOwners"]

_PRUNE_AT = 256


class KeyClaim:
    """Keeps a key in mind for as long as somebody has this object: a request may store under it yet."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key


class KeyOwners:
    """Which keys, that is, namespaces of a tree, belong to which namespace of a user.

    A key is forgotten, at some time, when nothing is cached under it and nobody claims it, so that one namespace for
    each of a million users does not grow without bound; not when it is cleared, as something may be stored under it
    again.

    All methods but `user_of` are to be called under the lock of the cache.

    Args:
        tree: Whose namespaces they are.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._keys_of: dict[bytes, dict[bytes, bytes]] = {}  # user -> the tree's form of a key -> key
        self._users: dict[bytes, bytes] = {}  # the tree's form of a key -> the user who came last with it
        self._claims: weakref.WeakValueDictionary[bytes, KeyClaim] = weakref.WeakValueDictionary()
        self._prune_at = _PRUNE_AT

    def __len__(self) -> int:
        return len(self._users)

    def add(self, user: bytes, key: bytes) -> bytes:
        """Say whose a key is, before something is stored under it, and under the same lock.

        Args:
            user: Canonical namespace of the user.
            key: As given to the tree.

        Returns:
            The tree's form of the key.
        """
        canonical = canonical_namespace(key)
        if self._users.get(canonical) == user:
            return canonical
        if len(self._users) >= self._prune_at:
            self._prune()
        self._users[canonical] = user
        self._keys_of.setdefault(user, {})[canonical] = key
        return canonical

    def claim(self, user: bytes, key: bytes) -> KeyClaim:
        """The same, for something that is stored later: the key is kept in mind until the claim is dropped."""
        canonical = self.add(user, key)
        claim = self._claims.get(canonical)
        if claim is None:
            claim = self._claims[canonical] = KeyClaim(key)
        return claim

    def keys_of(self, user: bytes) -> set[bytes]:
        """Keys of a user's namespace, as given to the tree: all under which something is cached are among them."""
        return set(self._keys_of.get(user, {}).values())

    def users(self) -> dict[bytes, bytes]:
        """The user of each key, by the tree's form of the key (a copy)."""
        return dict(self._users)

    def user_of(self, canonical: bytes) -> bytes:
        """Whose a key is, from the tree's form of it; itself if nobody said. From any thread, without a lock."""
        return self._users.get(canonical, canonical)

    def _prune(self) -> None:
        roots, claims = self._tree._roots, self._claims
        for user, keys in list(self._keys_of.items()):
            for canonical in [known for known in keys if known not in roots and known not in claims]:
                del keys[canonical]
                self._users.pop(canonical, None)
            if not keys:
                del self._keys_of[user]
        # As many again may come before the next time: a constant amount of work for each.
        self._prune_at = max(_PRUNE_AT, 2 * len(self._users))
