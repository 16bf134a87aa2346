"""Arrays and meshes of devices: layouts, collectives and transfers."""
