"""Agreeing on SMC-R before CLC begins: the TCP option, and same-host discovery."""
