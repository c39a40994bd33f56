"""Keras' devices are those of the framework that it runs on."""

from __future__ import annotations

from typing import Any

import keras


def describe() -> dict[str, Any]:
    """Return version and backend; the backend's own adapter describes the devices."""
    backend = keras.backend.backend()
    return {
        "version": keras.__version__,
        "title": f"keras on {backend}",
        "backend": backend,
        "devices": [],
        "notes": [f"runs on {backend}, which has the devices; KERAS_BACKEND chooses another"],
    }
