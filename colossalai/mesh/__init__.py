"""The mesh-and-layout core: who talks to whom, where every tensor lies, and what it costs to move it.

This package imports nothing from the rest of ``colossalai``.
"""

from colossalai.mesh.mesh import Axes, Mesh, mesh_coordinates, mesh_groups

__all__ = ["Axes", "Mesh", "mesh_coordinates", "mesh_groups"]
