"""Worker processes: started, cold or warm; watched, signalled, killed and reaped."""
