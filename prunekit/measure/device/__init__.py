"""Times of networks on another machine: a kit of files that is measured there, and what comes back."""
