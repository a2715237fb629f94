"""The commands of ``bertvision store``: what is kept, looked into, checked, brought in and out."""
