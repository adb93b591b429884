"""Pictures of what a model computes: feature maps, filters."""
