//! Protection of the admin port against web pages in a browser.
//!
//! The port is on loopback and has no authentication, so a page that makes a browser on this host
//! send requests could use it. Two such attacks are known:
//!
//! - DNS rebinding: a page of `evil.example` resolves its name to 127.0.0.1 and may then read our
//!   answers. The Host header still contains `evil.example`; only addresses and `localhost` pass.
//! - A form that posts to `http://127.0.0.1:15000/quitquitquit`. The browser sends the origin of
//!   the page as Origin, which differs from Host.
//!
//! A page cannot read the answer to a request without Origin, such as that of an image. Browsers
//! describe it by Sec-Fetch-Site, and it is refused too: it would take a place of
//! `/dashboard/events`.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_DEST: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// Refuses requests with 403 that could come from a foreign web page.
pub(super) async fn refuse_foreign_pages(request: Request, next: Next) -> Response {
    if is_local(request.headers()) {
        next.run(request).await
    } else {
        let text = "forbidden: the Host or Origin header is not local; use an IP address or \
                    localhost\n";
        (StatusCode::FORBIDDEN, text).into_response()
    }
}

fn is_local(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(host) = text(header::HOST) else {
        return false;
    };
    let from_here = match text(header::ORIGIN) {
        Some(origin) => origin.strip_prefix("http://") == Some(host),
        None => !headers.contains_key(header::ORIGIN),
    };
    from_here && names_this_host(host) && !is_embedded(text(SEC_FETCH_SITE), text(SEC_FETCH_DEST))
}

/// Returns true for a request that another page makes for itself, and not to open a new page.
fn is_embedded(site: Option<&str>, dest: Option<&str>) -> bool {
    site.is_some_and(|site| site != "same-origin" && site != "none") && dest != Some("document")
}

fn names_this_host(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority.host();
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    bare.parse::<IpAddr>().is_ok() || name.eq_ignore_ascii_case("localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(host: Option<&str>, origin: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in [(header::HOST, host), (header::ORIGIN, origin)] {
            if let Some(value) = value {
                headers.insert(name, value.parse().expect("a header value"));
            }
        }
        is_local(&headers)
    }

    #[test]
    fn addresses_and_localhost_are_answered_and_other_names_are_not() {
        for host in ["127.0.0.1:15000", "[::1]:15000", "localhost:15000", "LOCALHOST", "10.0.0.1"] {
            assert!(answered(Some(host), None), "{host}");
        }
        for host in ["evil.example:15000", "localhost.evil.example", "127.0.0.1.evil.example", ""] {
            assert!(!answered(Some(host), None), "{host}");
        }
        assert!(!answered(None, None));
    }

    #[test]
    fn an_image_of_a_foreign_page_is_refused_and_a_link_is_followed() {
        for (site, dest, refused) in [
            (None, None, false),
            (Some("none"), Some("document"), false),
            (Some("same-origin"), Some("empty"), false),
            (Some("cross-site"), Some("document"), false),
            (Some("cross-site"), Some("image"), true),
            (Some("cross-site"), Some("iframe"), true),
            (Some("same-site"), None, true),
        ] {
            assert_eq!(is_embedded(site, dest), refused, "{site:?} {dest:?}");
        }
    }

    #[test]
    fn a_form_of_another_origin_is_refused() {
        let host = Some("127.0.0.1:15000");
        assert!(answered(host, Some("http://127.0.0.1:15000")));
        for origin in ["http://evil.example", "null", "http://127.0.0.1:8080", "é"] {
            assert!(!answered(host, Some(origin)), "{origin}");
        }
    }
}
