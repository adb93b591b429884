"""Pictures of what a model computes: feature maps, filters, class activation maps, histograms."""
