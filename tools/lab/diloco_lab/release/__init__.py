"""What a release needs: no known vulnerability in what it uses, and files that can be made again."""
