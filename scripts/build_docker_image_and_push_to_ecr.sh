#!/usr/bin/env bash
# Builds an agent's image for AgentCore Runtime (arm64) and pushes it to ECR.
#
#   scripts/build_docker_image_and_push_to_ecr.sh --dockerfile=PATH --tag=TAG [--context=FOLDER] [--dry-run]
#
# AWS_REGION, AWS_ACCOUNT and ECR_REPO_NAME come from .env at the top of the repository, or from the
# environment, which takes precedence. --dry-run prints the commands instead of running them.
set -euo pipefail

fail() {
  echo "$1" >&2
  exit 2
}

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dockerfile="" tag="" context=$top dry_run=false
for argument in "$@"; do
  case $argument in
    --dockerfile=*) dockerfile=${argument#*=} ;;
    --tag=*) tag=${argument#*=} ;;
    --context=*) context=${argument#*=} ;;
    --dry-run) dry_run=true ;;
    -h | --help)
      sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) fail "There is no option $argument; see --help." ;;
  esac
done
[[ -n $dockerfile ]] || fail "Name the Dockerfile: --dockerfile=PATH"
[[ -n $tag ]] || fail "Name the image's tag: --tag=TAG"
[[ -f $dockerfile ]] || fail "There is no Dockerfile $dockerfile."

if [[ -f $top/.env ]]; then
  while IFS='=' read -r name value; do
    value=${value%\"}
    value=${value#\"}
    case $name in
      AWS_REGION | AWS_ACCOUNT | ECR_REPO_NAME) [[ -n ${!name:-} ]] || export "$name=$value" ;;
    esac
  done < <(grep -E '^[A-Z_]+=' "$top/.env" || true)
fi
for name in AWS_REGION AWS_ACCOUNT ECR_REPO_NAME; do
  [[ -n ${!name:-} ]] || fail "$name is not set. Set it in $top/.env (see .env.example)."
done

registry=$AWS_ACCOUNT.dkr.ecr.$AWS_REGION.amazonaws.com
image=$registry/$ECR_REPO_NAME:$tag

run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

run docker buildx build --platform linux/arm64 --file "$dockerfile" --tag "$image" --load "$context"
if $dry_run; then
  echo "aws ecr get-login-password --region $AWS_REGION | docker login --username AWS --password-stdin $registry"
else
  aws ecr get-login-password --region "$AWS_REGION" |
    docker login --username AWS --password-stdin "$registry"
  aws ecr describe-repositories --region "$AWS_REGION" --repository-names "$ECR_REPO_NAME" > /dev/null ||
    aws ecr create-repository --region "$AWS_REGION" --repository-name "$ECR_REPO_NAME" > /dev/null
fi
run docker push "$image"
echo "$image"
