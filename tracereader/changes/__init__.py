"""The changes that a report proposes: each is declared once, beside the function that proposes it."""
