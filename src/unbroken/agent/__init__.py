"""The program in each pod (`unbrokenrun`): starts, watches and stops the workers of one node."""
