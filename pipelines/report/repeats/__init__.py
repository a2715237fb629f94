"""Methods of fine-tuning over seeds, as a section of a report and as a page of their own."""
