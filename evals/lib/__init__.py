"""What experiments share: records, times, pictures, claims."""
