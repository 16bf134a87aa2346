"""Host processes: who decides, who is told, and who has died."""
