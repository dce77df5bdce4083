def getDevice():
    return 1


def getDeviceCount():
    return 2
