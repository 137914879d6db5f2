"""Meshes and logical-axis rules: how arrays are laid out over devices."""
