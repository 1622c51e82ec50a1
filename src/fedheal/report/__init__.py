"""Reports from run folders: tables, conclusions, figures, the HTML page, diagnoses."""
