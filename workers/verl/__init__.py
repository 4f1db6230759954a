"""What trainers of the verl family hand in and take back."""
