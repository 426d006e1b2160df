"""Who speaks SMC-R: the TCP option, and same-host discovery."""
