"""Model ids of the Hugging Face hub: download to, or find in, its cache."""

from __future__ import annotations

import re
from pathlib import Path

# Only what a model needs is downloaded: no .bin or .pth twins, no original/ folder, no second copy of the weights.
_TEXT_FILES = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)
_UNWANTED = ("*/*", "consolidated*.safetensors")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_id(name: str) -> bool:
    """Whether the name has the form of a hub id, "owner/name" or "name", and not of a file's path."""
    return _REPO_ID.fullmatch(name) is not None and not name.endswith((".gguf", ".safetensors", ".json"))


def fetch_snapshot(
    repo_id: str, *, revision: str | None, token: str | None, download_dir: str | None, weights: bool
) -> Path:
    """Directory holding the repository's config, tokenizer and, if asked for, safetensors files.

    revision: branch, tag or commit (None: main). download_dir replaces the cache's place (None: HF_HUB_CACHE, or
    HF_HOME/hub). Without a network, or with HF_HUB_OFFLINE=1, the cache is used as it stands. ValueError where the
    repository cannot be had: unknown, no access, unknown revision, or offline and not (wholly) in the cache.
    """
    from huggingface_hub import snapshot_download  # a slow import, needed for hub ids only
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def snapshot(local_files_only: bool) -> Path:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            cache_dir=download_dir,
            allow_patterns=list(_TEXT_FILES + _WEIGHT_FILES * weights),
            ignore_patterns=list(_UNWANTED),
            local_files_only=local_files_only,
        )
        return Path(folder)

    # The client raises some failures of the connection (a proxy that refuses) as the bare error class of its HTTP
    # library, which differs between its versions, and does not look into the cache then.
    connection_error = HfHubHTTPError.__bases__[0]
    what = "model" if weights else "tokenizer"
    at = f" at revision {revision!r}" if revision is not None else ""
    try:
        try:
            return snapshot(local_files_only=False)
        except Exception as error:
            if not isinstance(error, connection_error) or isinstance(error, HfHubHTTPError):
                raise
            return snapshot(local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{what} {repo_id!r}{at} is no local path and is not complete in the hub cache, and the hub cannot be "
            f"reached; check the name, go online (unset HF_HUB_OFFLINE), or pass a local directory. {error}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ValueError(
            f"{what} {repo_id!r}{at} is no local path and the hub refused it; check the name and the revision, and "
            f"pass a token if the model is private or gated. {error}"
        ) from error
