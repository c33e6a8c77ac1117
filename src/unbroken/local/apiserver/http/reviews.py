"""Reviews: questions about the caller that are answered and not stored.

A client with the server's token may do everything; RBAC objects are stored for the clients that
manage them and restrict nobody. The answers say so.
"""

from __future__ import annotations

import hmac

from unbroken.local.apiserver.schema.constraints import invalid_value

from .requests import Target
from .status import ApiError, Object, bad_request, invalid

USER = {"username": "unbroken:admin", "groups": ["system:masters", "system:authenticated"]}
WHY = "the local cluster's token may do everything; RBAC objects are stored, not enforced"
ACCESS = (
    "selfsubjectaccessreviews",
    "subjectaccessreviews",
    "localsubjectaccessreviews",
)


def answer(target: Target, body: Object, token: str) -> Object:
    """The review with its status; ApiError 400 for one that asks nothing."""
    plural, spec = target.kind.plural, body.get("spec")
    if plural == "selfsubjectreviews":
        return {**body, "status": {"userInfo": USER}}
    if not isinstance(spec, dict):
        raise bad_request(f"{target.kind.kind}: spec must be an object")
    if plural in ACCESS:
        if not spec.get("resourceAttributes") and not spec.get("nonResourceAttributes"):
            text = "exactly one of nonResourceAttributes or resourceAttributes must be specified"
            cause = invalid_value("spec.resourceAttributes", None, text)
            raise invalid(target.kind.group, target.kind.kind, "", [cause])
        return {**body, "status": {"allowed": True, "reason": WHY}}
    if plural == "selfsubjectrulesreviews":
        rule = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
        other = {"verbs": ["*"], "nonResourceURLs": ["*"]}
        return {
            **body,
            "status": {
                "resourceRules": [rule],
                "nonResourceRules": [other],
                "incomplete": False,
            },
        }
    if plural == "tokenreviews":
        asked = spec.get("token")
        if not isinstance(asked, str) or not asked:
            return {**body, "status": {"user": {}, "error": "no token was given"}}
        if hmac.compare_digest(asked.encode(), token.encode()):
            return {**body, "status": {"authenticated": True, "user": USER}}
        return {**body, "status": {"user": {}, "error": "the token is not known"}}
    raise ApiError(404, "NotFound", "the server could not find the requested resource")
