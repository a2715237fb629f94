"""Generated reading comprehension, which the quickstart learns without a download."""
