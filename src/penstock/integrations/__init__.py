"""Other engines on this data plane. Each is a plugin of its host: nothing of penstock imports one."""
