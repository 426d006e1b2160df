"""Who speaks SMC-R, agreed before CLC begins: the TCP option, and same-host discovery."""
