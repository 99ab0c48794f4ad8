"""Reading model folders as they are published on the Hugging Face Hub."""
