"""Claims about DiLoCo and this project, with repeatable measurements."""
