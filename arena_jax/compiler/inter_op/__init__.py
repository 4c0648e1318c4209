"""Inter-op: how layers are cut into stages on submeshes, and what that costs."""
