"""Claims about DiLoCo and this project, measured so that anybody can repeat them."""
