"""The commands: one file per verb; heavy imports happen inside the verb."""
