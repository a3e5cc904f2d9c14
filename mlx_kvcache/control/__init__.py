"""Who owns which cache: protocols, the factory, sessions by key, and the op over the active one."""
