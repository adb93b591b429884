"""The trial of a plan: masked and compact model run side by side, and what differs is locked."""
